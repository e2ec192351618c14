# frozen_string_literal: true

require "json"
require "net/http"
require "openssl"
require_relative "etcd_cluster"
require_relative "nodes_case"

# Jobs whose nodes meet in etcd: any node may be lost, and any member of an etcd of three.
class EtcdTest < NodesCase
  WAIT = 'echo "$RANK of $WORLD_SIZE restart $TORCHELASTIC_RESTART_COUNT generation $TDDP_GENERATION"; while [ ! -e $1 ]; do sleep 0.05; done'
  SOON = "heartbeat_timeout=5,last_call_timeout=1" # for those that wait for a loss
  LATE = "heartbeat_timeout=60,last_call_timeout=1"

  def setup
    skip EtcdCluster.obstacle if EtcdCluster.obstacle
    super
  end

  def teardown
    @cluster&.continue_all
    super
  ensure
    @cluster&.remove
  end

  def etcd(members: 1, **options)
    @cluster = EtcdCluster.new(Array.new(members) { ["127.0.0.1", free_port, free_port] }, **options)
  end

  def meet(*flags, nodes: "2:3", conf: LATE, **options)
    start("--nnodes=#{nodes}", "--rdzv-backend=etcd", "--rdzv-endpoint=#{@cluster.endpoints}", "--rdzv-id=my-job", "--rdzv-conf=#{conf}",
      *flags, **options)
  end

  def gather(count, *arguments, **options)
    runs = count.times.map { meet(*arguments, **options) }
    runs.each { |run| run.await(/of #{count} restart 0/) }
    runs
  end

  # The node that coordinates is rank 0 of the first round.
  def leader(runs)
    runs.find { |run| run.out.start_with?("0 of") }
  end

  def generations(run)
    run.out.scan(/generation (\d+)/).flatten.map(&:to_i)
  end

  def test_a_job_of_three_nodes
    etcd
    runs = gather(3, *wait_for_go)
    finish_all(runs)
    assert_equal %w[0 1 2], runs.map { |run| run.out[0] }.sort
    runs.each { |run| assert_equal 1, run.out.lines.size }
    assert_equal 1, runs.flat_map { |run| generations(run) }.uniq.size
  end

  def test_ranks_that_are_asked_for
    etcd
    runs = [1, 0].map { |rank| meet("--node-rank=#{rank}", *shell("echo $RANK"), nodes: 2) }
    assert_equal %W[1\n 0\n], runs.map(&:finish).map(&:out)
  end

  def test_the_coordinator_is_lost_and_comes_back
    etcd
    runs = gather(3, *wait_for_go, conf: SOON)
    lost = leader(runs)
    lose(lost)
    left = runs - [lost]
    left.each { |run| run.await(/of 2 restart 0/) }
    back = meet(*wait_for_go, conf: SOON)
    back.await(/of 3 restart 0/)
    left.each { |run| run.await(/of 3.*of 2.*of 3/m) }
    finish_all([*left, back])
    left.each { |run| assert_equal generations(run).sort.uniq, generations(run) }
  end

  def test_another_node_is_lost
    etcd
    runs = gather(3, *wait_for_go, conf: SOON)
    lost = (runs - [leader(runs)]).first
    lose(lost)
    left = runs - [lost]
    left.each { |run| run.await(/of 2 restart 0/) }
    finish_all(left)
  end

  def test_the_coordinator_leaves
    etcd
    runs = gather(3, *wait_for_go)
    gone = leader(runs)
    gone.signal(:INT)
    assert_code 130, gone.finish
    left = runs - [gone]
    left.each { |run| run.await(/of 2 restart 0/) }
    finish_all(left)
  end

  def test_a_job_of_fixed_size_survives_with_a_restart
    etcd
    runs = gather(3, "--max-restarts=1", *wait_for_go, nodes: 3, conf: SOON)
    lost = leader(runs)
    lose(lost)
    back = meet("--max-restarts=1", *wait_for_go, nodes: 3, conf: SOON)
    back.await(/of 3 restart/)
    left = runs - [lost]
    left.each { |run| run.await(/of 3.*of 3/m) }
    finish_all([*left, back])
  end

  def test_a_worker_fails
    etcd
    runs = 2.times.map { meet(*shell("[ \"$RANK\" = 0 ] && exit 7; #{IDLE}"), nodes: 2) }
    results = runs.map(&:finish)
    results.each { |result| assert_code 1, result }
    said = results.map(&:err).join
    assert_match(/FAILED: rank 0, exit code 7/, said)
    assert_match(/FAILED elsewhere: rank 0 on node 0: exit code 7/, said)
  end

  # Any one of three members may be away, stopped or killed, while the job runs.
  def test_each_member_of_three_is_lost_in_turn
    etcd(members: 3)
    runs = gather(2, *wait_for_go)
    3.times do |member|
      @cluster.kill(member)
      @cluster.start(member)
      @cluster.stop((member + 1) % 3)
      third = meet(*wait_for_go)
      third.await(/of 3 restart 0/)
      # The others' workers of this round as well: they end with it, and might not have come so far.
      runs.each { |run| run.await(/(of 3 .*?of 2 .*?){#{member}}of 3 /m) }
      @cluster.continue((member + 1) % 3)
      third.signal(:INT)
      assert_code 130, third.finish
      runs.each { |run| run.await(/(of 3 .*?of 2 .*?){#{member + 1}}/m) }
    end
    finish_all(runs)
    runs.each { |run| assert_empty run.out.scan(/restart [1-9]/) }
  end

  # A certificate of its own for 127.0.0.1, signed by `issuer` ([certificate, key]) or by itself; in the files NAME.pem and NAME.key.
  def certify(name, issuer = nil)
    key = OpenSSL::PKey::RSA.new(2048)
    made = OpenSSL::X509::Certificate.new
    made.version = 2
    made.serial = SecureRandom.random_number(1 << 64)
    made.subject = OpenSSL::X509::Name.new([["CN", name]])
    made.issuer = issuer ? issuer[0].subject : made.subject
    made.public_key = key.public_key
    made.not_before = Time.now - 86_400
    made.not_after = Time.now + 86_400
    extensions = OpenSSL::X509::ExtensionFactory.new
    made.add_extension(extensions.create_extension("basicConstraints", issuer ? "CA:FALSE" : "CA:TRUE", true))
    made.add_extension(extensions.create_extension("subjectAltName", "IP:127.0.0.1")) if issuer
    made.sign(issuer ? issuer[1] : key, "SHA256")
    File.write(file("#{name}.pem"), made.to_pem)
    File.write(file("#{name}.key"), key.to_pem)
    [made, key]
  end

  def file(name)
    File.join(@folder, name)
  end

  # One that wants a certificate of each client.
  def encrypted_etcd
    authority = certify("authority")
    %w[server client].each { |name| certify(name, authority) }
    etcd(scheme: "https", flags: ["--cert-file", file("server.pem"), "--key-file", file("server.key"), "--client-cert-auth",
      "--trusted-ca-file", file("authority.pem")])
  end

  def test_certificates
    encrypted_etcd
    conf = "protocol=https,cacert=#{file("authority.pem")},cert=#{file("client.pem")},key=#{file("client.key")}"
    results = 2.times.map { meet(*shell("echo $RANK"), nodes: 2, conf: conf) }.map(&:finish)
    results.each { |result| assert_code 0, result }
    assert_equal %W[0\n 1\n], results.map(&:out).sort
    [conf.sub(/cacert=[^,]*,/, ""), conf[/.*authority.pem/], "protocol=http"].each do |without|
      result = meet(*shell("echo no"), nodes: 2, conf: "#{without},join_timeout=1").finish
      assert_code 1, result
      assert_match(/certificate|SSL|TLS|HTTPS|Empty reply/i, result.err)
    end
  end

  # Makes a user, and from then on nothing goes without one.
  def want_login(user, password)
    host, port = @cluster.endpoints.split(":")
    ask = lambda do |path, body|
      eventually("etcd to answer #{path}") do
        Net::HTTP.post(URI("http://#{host}:#{port}/v3/auth/#{path}"), JSON.generate(body)).is_a?(Net::HTTPOK)
      rescue SystemCallError, EOFError
        false
      end
    end
    ask.call("user/add", {name: user, password: password})
    ask.call("role/add", {name: "root"})
    ask.call("user/grant", {user: user, role: "root"})
    ask.call("enable", {})
  end

  def test_a_login
    etcd
    want_login("root", "open=sesame")
    File.write("#{@folder}/password", "open=sesame\n")
    runs = ["password=open=sesame", "password_file=#{@folder}/password"].map { |conf| meet(*shell("echo $RANK"), nodes: 2, conf: "username=root,#{conf}") }
    results = runs.map(&:finish)
    results.each { |result| assert_code 0, result }
    assert_equal %W[0\n 1\n], results.map(&:out).sort
    ["username=root,password=barley", "username=nobody", "join_timeout=600"].each do |conf|
      result = meet(*shell("echo no"), nodes: 2, conf: conf).finish
      assert_code 1, result
      assert_match(/etcd( refuses the user|: .*(user name is empty|permission|authentication))/, result.err)
    end
  end

  def test_an_etcd_that_is_not_there
    @cluster = EtcdCluster.new([])
    result = start("--nnodes=2", "--rdzv-backend=etcd", "--rdzv-endpoint=127.0.0.1:#{port = free_port}", "--rdzv-id=my-job",
      "--rdzv-conf=join_timeout=1", *shell("echo no")).finish
    assert_code 1, result
    assert_empty result.out
    assert_match(/no torchrun leads the job "my-job" within 1 s: tried 127\.0\.0\.1:#{port} \(etcd does not answer: .*onnect.*check that etcd answers there/m, result.err)
  end

  def test_what_is_no_etcd
    @cluster = EtcdCluster.new([])
    TCPServer.open("127.0.0.1", 0) do |server|
      Thread.new do
        loop { server.accept.tap { |client| client.write("HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\nno") }.close }
      rescue IOError
        # The test is over.
      end
      result = start("--nnodes=2", "--rdzv-backend=etcd", "--rdzv-endpoint=127.0.0.1:#{server.addr[1]}", "--rdzv-id=my-job", *shell("echo no")).finish
      assert_code 1, result
      assert_match(/not an answer of etcd's v3 gateway/, result.err)
    end
  end

  def test_another_kind_of_job
    etcd
    first = meet(*wait_for_go, nodes: "1:2")
    first.await(/of 1/)
    result = meet(*shell("echo no"), nodes: "1:3").finish
    assert_code 1, result
    assert_match(/was started with --nnodes=1:2 .*this node with --nnodes=1:3/, result.err)
    finish_all([first])
  end
end
